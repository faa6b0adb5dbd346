"""The binding: llama.cpp's libraries through ctypes, models, generation and saved states.

native.py has libggml-kvq's own interface, loader.py finds and loads the libraries of llama.cpp, writer.py is the one
thread that computes. model.py has what users call; the other modules are its parts.
"""
