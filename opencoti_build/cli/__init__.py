"""The command line: one module a collection of tasks; they parse, call the library and print."""
