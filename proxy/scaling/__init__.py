"""How many workers each pool needs: a controller that is fed with what was measured and decides, without acting."""
