"""Context parallelism: a sequence split over ranks."""
