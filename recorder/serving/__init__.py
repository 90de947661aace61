"""What serving engines have in common: steps of many requests, and how they become rows of a tape.

`batch` says what a step is, `device` takes tensors off the device without making it wait,
`kernels` measures a distribution in one pass, `blocks` collects steps, `wire` carries them to
`scribe_process`, where `scribe` writes the rows and `prefix` knows where a cached prefix was
computed.
"""
