"""Tuning: schedules that the model left are measured, and the fastest kept in the tables of attngen/schedule, which
select-tiles reads."""
