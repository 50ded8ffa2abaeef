"""Pipeline parallelism: schedules in pure Python, and the engine that runs one."""
