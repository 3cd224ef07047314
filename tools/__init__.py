"""Programs that measure, compare, break, build and release this project. The product itself needs none of them."""
