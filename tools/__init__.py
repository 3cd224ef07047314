"""Development programs that measure, compare, break, build and release this project. They are not part of the
product.
"""
