"""Encodings of matrices with 8 bits a weight and less: how they are stored, and how they are
decoded.

A new one is a class in ``forms.py``, with its decoder in ``decoding.py``; a new GGUF type is a
row of ``GGUF_BLOCKS`` there and a decoder in ``gguf.py``.
"""
