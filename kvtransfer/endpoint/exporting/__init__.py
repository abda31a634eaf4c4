"""What a rank does for those who fetch its blocks."""
