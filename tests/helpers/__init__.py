"""What the tests share, and what writes pages from them."""
