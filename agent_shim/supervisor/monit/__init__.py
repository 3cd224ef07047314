"""The monit control language: the lexer, the parsers, and the values that they return."""
