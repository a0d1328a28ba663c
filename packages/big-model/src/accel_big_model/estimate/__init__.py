"""Memory that training takes, by dtype and strategy, without taking it.

    estimating      `estimate_memory`, from a model to rows
    shapes          parameters without values, the blocks they lie in
    tracking        bytes that are alive while operations run
    activations     a forward and a backward without memory
    optimizers      state, and what a step needs, tried without memory
    strategies, fully_sharded, zero     the arithmetic of each strategy
    sources, inputs     models and batches by their text
    model_arguments what a command line says of a model, its batch and its optimizer
    command         `accel estimate-memory`

What is assumed:

- The peak of a step that is not the first, on the rank that holds most; every gradient is dropped
  after the step. All trained parameters take part.
- Under "bf16" and "fp16" parameters, gradients and state are in fp32, and autocast computes: its
  copies of weights are activations. Under "bf16-true" all are in bfloat16; ZeRO adds fp32 masters.
- Strategies have their default options. Each one's formula is in `strategies.FORMULAS`.
- Not in: the process itself and its libraries, workspaces of kernels, fragments of the allocator,
  the loader, what a communication library allocates.
"""
