//! The figures of the pool, in a process of its own: other tests take memory, too.

use tensor::{Buffer, Scratch, pool_stats, reset_peak, settle_pool, trim_pool};

const MIB: usize = 1 << 20;

#[test]
fn the_pool_tells_what_it_has_and_gives_back_what_nobody_uses() {
    let (large, small) = (Buffer::new(100 * MIB), Buffer::new(1000));
    let stats = pool_stats();
    assert_eq!((stats.in_use, stats.peak_in_use), (100 * MIB + 1000, 100 * MIB + 1000));
    // A slab for each of both, the small ones' of the least size.
    assert_eq!((stats.system_allocations, stats.held), (2, 164 * MIB));
    assert_eq!(stats.resident, 100 * MIB + 1024, "whole cache lines");
    // In a second slab, as large as the first.
    let mut more = [30 * MIB, 50 * MIB].map(Buffer::new);
    assert_eq!((pool_stats().system_allocations, pool_stats().held), (3, 264 * MIB));
    more[0].slice_mut::<u8>()[30 * MIB - 1] = 1;
    more[1].slice_mut::<u8>()[0] = 2;
    assert_eq!((large.slice::<u8>()[100 * MIB - 1], more[0].slice::<u8>()[30 * MIB - 1]), (0, 1), "apart");

    drop(large);
    assert_eq!((pool_stats().in_use, pool_stats().peak_in_use), (80 * MIB + 1000, 180 * MIB + 1000));
    reset_peak();
    assert_eq!(pool_stats().peak_in_use, 80 * MIB + 1000);
    trim_pool();
    assert_eq!(pool_stats().held, 164 * MIB);

    // What a thread keeps for kernels is not in use, and goes when memory is to be given back.
    drop(Scratch::<f32>::new(1000));
    assert_eq!((pool_stats().in_use, pool_stats().kept), (80 * MIB + 1000, 4096));
    trim_pool();
    assert_eq!(pool_stats().kept, 0);

    // A reserve is added where less than an eighth of what was used is left.
    settle_pool();
    assert_eq!(pool_stats().held, 164 * MIB, "20 of 100 MiB are left");
    let last = Buffer::new(15 * MIB);
    settle_pool();
    assert_eq!(pool_stats().held, 264 * MIB);

    more[1].clear();
    assert_eq!((more[1].slice::<u8>()[0], pool_stats().cleared), (0, 50 * MIB));
    drop((small, more, last));
    trim_pool();
    let stats = pool_stats();
    assert_eq!((stats.in_use, stats.held, stats.resident), (0, 0, 0));

    // Fresh memory is zero, and what is dropped serves what is as large, or smaller.
    let fresh = Buffer::new(100 * MIB);
    assert!(fresh.slice::<u8>().iter().all(|&byte| byte == 0));
    let place = fresh.slice::<u8>().as_ptr();
    drop(fresh);
    for mib in [100, 67, 33, 100] {
        assert_eq!(Buffer::new(mib * MIB).slice::<u8>().as_ptr(), place, "{mib} MiB");
    }
}
