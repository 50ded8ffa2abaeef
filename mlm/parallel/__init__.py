"""Mesh, collectives, layers, loss, sharding, random numbers, context; pipeline/ and expert/."""
