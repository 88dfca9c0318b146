// SPDX-License-Identifier: Apache-2.0
//
// Controls of the fake driver (fake_cuda.cpp), for tests.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

/// Forget faults and modes and start counting calls at 0; live objects stay.
void fake_cuda_reset(void);
/// Driver calls since reset; calls that only name errors or pop a context do not count.
uint64_t fake_cuda_calls(void);
/// Let call number `nth` (from 1) answer `code`. Sticky: and every later one, as a context that
/// has failed; what was queued is then never run.
void fake_cuda_fail(uint64_t nth, int code, int sticky);
/// The name of the entry point that answered with the injected fault; "" if none did yet.
const char* fake_cuda_failed_call(void);
/// Objects that exist: retained contexts, modules, streams, events, allocations.
uint64_t fake_cuda_live(void);
/// Contexts that this thread has pushed and not popped.
uint64_t fake_cuda_depth(void);
/// Let work finish only at the n-th look at an event from now on (0: at once).
void fake_cuda_lazy(uint64_t looks);
/// Damage the first descriptor of the next launch: 1 its length, 2 its offset.
void fake_cuda_damage(int how);
/// Declare host memory to be memory of a device.
void fake_cuda_adopt(const void* address, uint64_t bytes, int ordinal);
/// Devices report to be integrated (unified memory).
void fake_cuda_integrated(int yes);
/// A stream of the engine that runs nothing until it is opened.
void* fake_cuda_stalled_stream(void);
void fake_cuda_open_stream(void* stream);
void fake_cuda_free_stream(void* stream);
/// Queue a fill on a stream, as the engine's own work.
void fake_cuda_fill(void* stream, void* at, int value, uint64_t bytes);
/// Run everything that can run.
void fake_cuda_run(void);

#if defined(__cplusplus)
}
#endif
