"""The methods of a run: zeroth-order and first-order steps, behind one interface."""
