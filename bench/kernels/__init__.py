"""What compilers make of the kernels, for devices that are not here: `python -m bench.kernels` (`make kernels`).

`compiling` compiles in processes of their own and reads the code with `nvidia` and `amd`; `rules` says what must hold;
`page` writes docs/kernels.md. Nothing is timed: this says that a kernel's code is sound, not how fast it is.
"""
