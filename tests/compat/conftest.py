from rollout_workers import fresh_logging, make_pair, make_worker

__all__ = ["fresh_logging", "make_pair", "make_worker"]
