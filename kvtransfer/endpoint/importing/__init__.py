"""What a rank does to fetch the blocks of others."""
