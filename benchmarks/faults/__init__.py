"""Inject faults, and count which of them were found and which changed an answer."""
