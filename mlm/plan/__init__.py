"""A plan of a run before it starts: dry run, forecasts, search, calibration."""
