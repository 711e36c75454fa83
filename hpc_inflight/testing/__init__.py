"""What multi-rank tests need: assertions over all ranks, a pytest plugin, and starting whole jobs."""

from hpc_inflight.testing.asserts import assert_on_all_ranks, gather_on_all_ranks, wait_until

__all__ = ["assert_on_all_ranks", "gather_on_all_ranks", "wait_until"]
