// The kernels of rnn.cu on a CPU, by number, with arguments as cuLaunchKernel takes them.

#define EMULATED
#include "device.cuh"
#include "rnn.cu"

#include <type_traits>
#include <utility>

template <typename... Types, size_t... Places>
static void call(void (*kernel)(Types...), void **arguments, std::index_sequence<Places...>) {
  kernel(*(std::remove_reference_t<Types> *)arguments[Places]...);
}

template <typename... Types>
static void launch(void (*kernel)(Types...), const unsigned *grid, int threads, size_t shared, void **arguments) {
  emulator::launch(grid[0], grid[1], threads, shared, [=] {
    call(kernel, arguments, std::index_sequence_for<Types...>());
  });
}

extern "C" const char *run(const char *name, const unsigned *grid, int threads, size_t shared,
                           void **arguments, int count, void **tensors, const size_t *sizes) {
  emulator::problem.clear();
  emulator::tensors.clear();
  for (int i = 0; i < count; ++i) emulator::tensors.emplace_back((const char *)tensors[i], sizes[i]);
  const std::string wanted = name;
  if (wanted == "pack_layer") launch(pack_layer, grid, threads, shared, arguments);
  else if (wanted == "rnn_forward") launch(rnn_forward, grid, threads, shared, arguments);
  else if (wanted == "rnn_backward") launch(rnn_backward, grid, threads, shared, arguments);
  else emulator::problem = "no kernel has this name: " + wanted;
  return emulator::problem.c_str();
}
