"""Rows of data, prompts and candidates, scores and generated text."""
