"""What workers tell of their prefix caches, on its way to placement."""
