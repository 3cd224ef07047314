"""The monit control language: lexer, parsers, and the values that they return."""
