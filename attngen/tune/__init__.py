"""Tuning: measure the schedules that the cost model does not reject, and keep the fastest in the tables of
attngen/schedule, which select-tiles reads."""
