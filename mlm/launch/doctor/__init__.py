"""Checks of hosts, disks and the network before a run: `mlm doctor`."""
