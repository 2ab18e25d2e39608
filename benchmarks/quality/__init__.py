"""Predictions of a small model through each cache: the papers' tables, our own, and studies of one
paper."""
