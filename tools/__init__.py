"""Programs that measure, compare, break, build and release this project. The product needs none of them."""
