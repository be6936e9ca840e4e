"""The composition root: settings, wiring, processes, the embedded broker and the command line. Imports everything."""
