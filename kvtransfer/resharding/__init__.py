"""Copying between ranks whose caches hold different heads or blocks of different sizes. Pure: no sockets, no memory."""
