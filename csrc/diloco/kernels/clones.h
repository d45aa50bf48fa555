// DILOCO_CLONES: compiles a function once per instruction set and picks one when the program is loaded.
//
// All clones give the same bits: the files are built with -ffp-contract=off, and reductions have a fixed number of
// lanes. Off under ThreadSanitizer (the resolvers run before its runtime is up: segfault before main) and where there
// is no ifunc. DILOCO_NO_CLONES lets a test build each instruction set by itself.
#pragma once

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define DILOCO_NO_CLONES
#endif
#endif

#if defined(DILOCO_NO_CLONES) || defined(__SANITIZE_THREAD__) || !defined(__x86_64__) || !defined(__linux__)
#define DILOCO_CLONES
#else
#define DILOCO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

// Helpers must be inlined into the clone, or they would run with the default instruction set.
#define DILOCO_INLINE [[gnu::always_inline]] inline
