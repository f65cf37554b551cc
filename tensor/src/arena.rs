//! Where buffers lie: manages the free space of a few large blocks of memory, without touching that memory.
//!
//! Such a block is a *slab*. A buffer occupies a *place* in it. A freed place keeps its length until it is joined:
//! adjacent free places are coalesced into *holes*, from which places of any length are cut.
//!
//! ```text
//! | in use | free place | in use | hole             | in use | free            | nobody has been here   |
//!                                                            slab.free         slab.fresh               end
//! ```
//!
//! A step requests again the sizes that it has freed, and what was used last is still in a core's cache. So a freed
//! place is first kept as it is, for the next request of its length; a thread gets places that it freed itself before
//! those that others freed. A request that finds none is cut from the smallest hole that is large enough; if there is
//! none, all free places are coalesced first: a network's maps shrink from stage to stage, and memory that an early
//! stage has freed must serve the later stages, and the gradients, whatever their sizes. Memory that has never been
//! used comes last.
//!
//! For buffers larger than a core's cache, the place that was freed last is no better than any other, and with several
//! threads which one that is may be chance. So such a request first coalesces the free places, and takes the smallest
//! hole that is large enough: the maps of large images then fit together, whichever thread was first.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The start of a place: an offset in a virtual space in which the slabs follow one another, with gaps.
pub(crate) type Place = usize;

/// A request of this many bytes, or more, does not fit in a core's own cache.
const UNCACHED: usize = 1 << 22;
/// Among this many of the most recently freed places of a length, one that the requesting thread freed itself is
/// preferred.
const FEW: usize = 16;

/// Free and used places.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    slabs: Vec<Slab>,
    /// Free places that have not been coalesced, by length; last in, first out, among a thread's own and among all.
    recent: BTreeMap<usize, Vec<Freed>>,
    /// The coalesced free memory: start and length of each hole. No two holes are adjacent.
    holes: BTreeMap<Place, usize>,
    /// The same holes as (length, start).
    by_length: BTreeSet<(usize, Place)>,
}

/// A block of memory that was taken from the system.
#[derive(Debug)]
struct Slab {
    places: Range<Place>,
    /// From here on all of it is free.
    free: Place,
    /// From here on, the memory has never been in use.
    fresh: Place,
}

/// A free place, and which thread freed it.
#[derive(Debug)]
struct Freed {
    place: Place,
    by: usize,
}

/// A number that identifies this thread among those that are running.
fn this_thread() -> usize {
    thread_local! { static ITS_OWN: u8 = const { 0 }; }
    ITS_OWN.with(|own| std::ptr::from_ref(own).addr())
}

impl Arena {
    /// Takes a free place of this length; `None` if a slab must be added first.
    pub fn take(&mut self, len: usize) -> Option<Place> {
        if len >= UNCACHED {
            self.join();
        }
        let same = self.recent.get_mut(&len).and_then(|freed| {
            // Only among the last few: what was freed earlier is no longer in any cache.
            let few = freed.len().saturating_sub(FEW);
            let own = freed[few..].iter().rposition(|freed| freed.by == this_thread());
            own.map(|last| freed.remove(few + last)).or_else(|| freed.pop())
        });
        same.map(|freed| freed.place)
            .or_else(|| self.cut(len))
            .or_else(|| {
                self.join();
                self.cut(len)
            })
            .or_else(|| self.reach(len))
    }

    /// Makes a place free that was taken with this length.
    pub fn give_back(&mut self, place: Place, len: usize) {
        self.recent.entry(len).or_default().push(Freed { place, by: this_thread() });
    }

    /// Adds a slab, and says where it begins.
    pub fn add_slab(&mut self, len: usize) -> Place {
        // The gap keeps holes of neighbouring slabs apart.
        let begin = self.slabs.last().map_or(0, |last| last.places.end + 1);
        self.slabs.push(Slab { places: begin..begin + len, free: begin, fresh: begin });
        begin
    }

    /// Removes the slabs of which nothing is in use, and says where they began.
    pub fn remove_free_slabs(&mut self) -> Vec<Place> {
        self.join();
        let free = self.slabs.extract_if(.., |slab| slab.free == slab.places.start);
        free.map(|slab| slab.places.start).collect()
    }

    /// How much of the slabs has ever been in use.
    pub fn reached(&self) -> usize {
        self.slabs.iter().map(|slab| slab.fresh - slab.places.start).sum()
    }

    /// The longest run of a slab that has never been in use.
    pub fn unreached(&self) -> usize {
        self.slabs.iter().map(|slab| slab.places.end - slab.fresh).max().unwrap_or(0)
    }

    /// Cuts a place from the smallest hole that has room.
    fn cut(&mut self, len: usize) -> Option<Place> {
        let &(hole, place) = self.by_length.range((len, 0)..).next()?;
        self.remove_hole(place, hole);
        if hole > len {
            self.add_hole(place + len, hole - len);
        }
        Some(place)
    }

    /// Takes a place after all others of its slab.
    fn reach(&mut self, len: usize) -> Option<Place> {
        let slab = self.slabs.iter_mut().find(|slab| slab.places.end - slab.free >= len)?;
        let place = slab.free;
        slab.free += len;
        slab.fresh = slab.fresh.max(slab.free);
        Some(place)
    }

    /// Joins all free places with their neighbours.
    pub fn join(&mut self) {
        for (len, freed) in std::mem::take(&mut self.recent) {
            for Freed { place, .. } in freed {
                let (mut place, mut len) = (place, len);
                let before = self.holes.range(..place).next_back().map(|(&place, &len)| (place, len));
                if let Some((start, its)) = before.filter(|(start, its)| start + its == place) {
                    self.remove_hole(start, its);
                    (place, len) = (start, its + len);
                }
                if let Some(&after) = self.holes.get(&(place + len)) {
                    self.remove_hole(place + len, after);
                    len += after;
                }
                match self.slabs.iter_mut().find(|slab| slab.free == place + len) {
                    Some(slab) => slab.free = place,
                    None => self.add_hole(place, len),
                }
            }
        }
    }

    fn add_hole(&mut self, place: Place, len: usize) {
        self.holes.insert(place, len);
        self.by_length.insert((len, place));
    }

    fn remove_hole(&mut self, place: Place, len: usize) {
        self.holes.remove(&place);
        self.by_length.remove(&(len, place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_was_given_back_last_is_the_first_to_go_again_and_all_of_it_serves_larger_requests() {
        let mut arena = Arena::default();
        assert_eq!(arena.take(1), None);
        assert_eq!(arena.add_slab(100), 0);
        let [a, b, c] = [10, 10, 20].map(|len| arena.take(len).unwrap());
        assert_eq!([a, b, c], [0, 10, 20]);
        arena.give_back(a, 10);
        arena.give_back(b, 10);
        assert_eq!(arena.take(10), Some(b));
        arena.give_back(b, 10);
        assert_eq!(arena.take(18), Some(a), "joined, and cut");
        assert_eq!(arena.take(2), Some(18));
        assert_eq!(arena.reached(), 40);
        arena.give_back(c, 20);
        assert_eq!(arena.take(30), Some(c), "as much as there was, and some more");
        assert_eq!((arena.reached(), arena.unreached()), (50, 50));
        assert_eq!(arena.take(60), None);
    }

    #[test]
    fn what_no_cache_holds_lies_where_it_fits_and_not_where_chance_has_it() {
        let places = |order: [usize; 2]| {
            let mut arena = Arena::default();
            arena.add_slab(10 * UNCACHED);
            let [a, b] = [0, 1].map(|_| arena.take(UNCACHED).unwrap());
            for which in order {
                arena.give_back([a, b][which], UNCACHED);
            }
            [1, 3].map(|lengths| arena.take(lengths * UNCACHED).unwrap())
        };
        assert_eq!(places([0, 1]), [0, UNCACHED]);
        assert_eq!(places([1, 0]), places([0, 1]));
    }

    #[test]
    fn a_thread_gets_what_it_freed_itself_before_what_others_freed() {
        let mut arena = Arena::default();
        arena.add_slab(100);
        let [a, b] = [0, 1].map(|_| arena.take(10).unwrap());
        arena.give_back(a, 10);
        std::thread::scope(|scope| scope.spawn(|| arena.give_back(b, 10)).join().unwrap());
        assert_eq!(arena.take(10), Some(a), "its own, though the other was freed later");
        assert_eq!(arena.take(10), Some(b), "the other's, where there is none of its own");
    }

    proptest! {
        /// Each step takes a place of some length, or gives back one of those that are taken, or trims.
        #[test]
        fn no_two_places_overlap_and_nothing_is_lost(
            steps in prop::collection::vec((0..4u8, 1..300usize, any::<prop::sample::Index>()), 1..200),
        ) {
            let (mut arena, mut taken) = (Arena::default(), Vec::<(Place, usize)>::new());
            let mut slabs = BTreeMap::new();
            for (kind, len, which) in steps {
                match kind {
                    0 | 1 => {
                        let place = arena.take(len).unwrap_or_else(|| {
                            slabs.insert(arena.add_slab(1000), 1000);
                            arena.take(len).unwrap()
                        });
                        let (begin, slab) = slabs.range(..=place).next_back().unwrap();
                        prop_assert!(place + len <= begin + slab, "within one slab");
                        let apart = |&(other, its): &(usize, usize)| place + len <= other || other + its <= place;
                        prop_assert!(taken.iter().all(apart), "{place} and {len} from there, beside {taken:?}");
                        taken.push((place, len));
                    }
                    2 if !taken.is_empty() => {
                        let (place, len) = taken.swap_remove(which.index(taken.len()));
                        arena.give_back(place, len);
                    }
                    3 if len < 20 => for begin in arena.remove_free_slabs() {
                        let len = slabs.remove(&begin).unwrap();
                        prop_assert!(!taken.iter().any(|(place, _)| (begin..begin + len).contains(place)));
                    },
                    _ => {}
                }
            }
            for (place, len) in taken.drain(..) {
                arena.give_back(place, len);
            }
            arena.join();
            prop_assert!(arena.holes.is_empty() && arena.by_length.is_empty(), "{arena:?}");
            prop_assert_eq!(arena.remove_free_slabs().len(), slabs.len(), "every byte is free again");
        }
    }
}
