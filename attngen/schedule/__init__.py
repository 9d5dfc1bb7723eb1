"""Schedules: the passes that choose configs, and a table of measured configs per GPU, which `attngen tune` writes and
select-tiles reads."""
