pytest_plugins = ["hpc_inflight.testing.plugin"]
