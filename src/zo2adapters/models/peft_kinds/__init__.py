"""Kinds of peft's adapters, one file each, and what all of them share."""
