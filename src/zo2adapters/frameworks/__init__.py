"""Other people's trainers: zeroth-order steps inside their loops."""
