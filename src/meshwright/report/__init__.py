"""Estimate and Trace → what a person reads. No torch."""
