"""Records TensorRT-LLM, PyTorch back end: front end, executor loop, weights, routes, tactics.

`targets` lists where it stands; `bind` patches the front end, `worker` the processes that run the
model. `output` and `frontend` see requests and their tokens, `loop` and `schedule` the batches,
`routes` the chosen experts, `weights` the versions, `settings` what is in force, `identity` which
engine a process belongs to. `ray` is the extension for Ray workers.
"""
