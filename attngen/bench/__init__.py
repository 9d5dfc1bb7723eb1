"""Measuring: generated modules beside their peers, schedules beside each other."""
