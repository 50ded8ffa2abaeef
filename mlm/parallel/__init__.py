"""Mesh, collectives, layers, loss, sharding, random numbers; pipeline/ and context/."""
