"""Benchmarks: generated modules compared with their peers."""
