"""Tuning: schedules that the model left are measured, and the fastest kept in a table, one file per GPU, that select-tiles asks."""
