// Bi-level routing attention: routing.cuh chooses regions, attention.cuh attends to them, in bf16
// with tensor_cores.cuh where heads have a size that it knows.

#include "attention.cuh"
#include "routing.cuh"
#include "tensor_cores.cuh"
