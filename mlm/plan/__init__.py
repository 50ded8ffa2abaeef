"""What a run will do, worked out before it starts."""
