"""Measurements that a user can repeat: side by side, in one process, alternating."""
