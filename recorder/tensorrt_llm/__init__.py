"""Records TensorRT-LLM, PyTorch back end: front end, executor loop, weights, routes, tactics.

`targets` lists where it stands, `bind` patches what is there, `output` and `frontend` see
requests and their tokens, `loop` and `schedule` the batches, `routes` the chosen experts,
`weights` the versions, `settings` what is in force, `identity` which engine a process belongs to,
`ray` the extension for Ray workers.
"""
