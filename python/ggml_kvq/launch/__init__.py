"""Programs of llama.cpp with our cache: llama-cli, llama-server and the rest (launcher.py), hosts that we did not build
(hosts.py, plugin.py), and what is wrong with an installation (doctor.py).
"""
