"""Development programs that measure, compare, break, build and release this project. The product does not use them."""
