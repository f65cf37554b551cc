//! Random numbers that are a function of (seed, stream, position) and of nothing else.
//!
//! [`Philox`] is the counter-based generator Philox4x32-10 (Salmon et al., "Parallel random numbers:
//! as easy as 1, 2, 3", SC 2011). It has no state that must be saved or kept in order: the numbers at a
//! position can be computed by any thread, on any device, at any time. That is what makes a run
//! repeatable with any number of threads and after a resume.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// One stream of random numbers: a key (the seed) and a stream number that together select one of
/// 2^128 independent sequences of 2^66 words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Philox {
    seed: u64,
    stream: u64,
}

impl Philox {
    /// The stream `stream` of the seed `seed`.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self { seed, stream }
    }

    /// A stream named by several numbers (purpose, epoch, sample, ...), mixed into one stream number.
    pub fn keyed(seed: u64, parts: &[u64]) -> Self {
        let stream = parts.iter().fold(0x243F_6A88_85A3_08D3, |mixed, &part| splitmix(mixed ^ part));
        Self { seed, stream }
    }

    /// The seed and the number of the stream.
    pub(crate) fn key(&self) -> [u64; 2] {
        [self.seed, self.stream]
    }

    /// The four random words at `position`.
    #[inline]
    pub fn block(&self, position: u64) -> [u32; 4] {
        let mut counter = [position as u32, (position >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        let mut key = [self.seed as u32, (self.seed >> 32) as u32];
        for round in 0..ROUNDS {
            if round > 0 {
                key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
            }
            let p0 = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
            let p1 = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
            counter = [
                (p1 >> 32) as u32 ^ counter[1] ^ key[0],
                p1 as u32,
                (p0 >> 32) as u32 ^ counter[3] ^ key[1],
                p0 as u32,
            ];
        }
        counter
    }

    /// The `index`-th word of the stream.
    #[inline]
    pub fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// The `index`-th uniform number in [0, 1), a multiple of 2^-24 (so that f32 holds it exactly).
    #[inline]
    pub fn uniform(&self, index: u64) -> f32 {
        unit(self.word(index))
    }

    /// A reader that takes the stream's numbers one after another, from its start.
    pub fn sequence(self) -> Sequence {
        Sequence { philox: self, next: 0, block: [0; 4] }
    }
}

/// A word as a uniform number in [0, 1), a multiple of 2^-24.
#[inline]
fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / (1u32 << 24) as f32)
}

/// The finaliser of splitmix64: a bijection of 64-bit words in which every input bit reaches every output bit.
fn splitmix(word: u64) -> u64 {
    let z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Takes the numbers of a [`Philox`] stream in order.
#[derive(Clone, Debug)]
pub struct Sequence {
    philox: Philox,
    next: u64,
    /// The block that contains `next`, unless `next` is the first word of its block.
    block: [u32; 4],
}

impl Sequence {
    /// The next word.
    pub fn word(&mut self) -> u32 {
        let place = (self.next % 4) as usize;
        if place == 0 {
            self.block = self.philox.block(self.next / 4);
        }
        self.next += 1;
        self.block[place]
    }

    /// The next uniform number in [0, 1) with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        let bits = (u64::from(self.word()) << 32 | u64::from(self.word())) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }

    /// The next uniform number from `low` to `high`, which rounding may reach; their difference must be finite.
    pub fn uniform_in(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.uniform()
    }

    /// The next integer in 0..bound, unbiased up to 2^-64. `bound` of 0 gives 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let bits = u64::from(self.word()) << 32 | u64::from(self.word());
        ((u128::from(bits) * bound as u128) >> 64) as usize
    }

    /// The next number of the standard normal distribution (Box and Muller's cosine branch).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * libm::log(1.0 - self.uniform())).sqrt();
        radius * libm::cos(std::f64::consts::TAU * self.uniform())
    }

    /// The next two numbers of the standard normal distribution, for the price of one and a half (both of Box and
    /// Muller's branches).
    pub fn normals(&mut self) -> [f64; 2] {
        let radius = (-2.0 * libm::log(1.0 - self.uniform())).sqrt();
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * self.uniform());
        [radius * cos, radius * sin]
    }

    /// A random order of 0..len (Fisher and Yates).
    pub fn permutation(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for last in (1..len).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' reference implementation (Random123, `kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(Philox::new(0, 0).block(0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = Philox::new(u64::MAX, u64::MAX);
        assert_eq!(ones.block(u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = Philox::new(0x299f_31d0_a409_3822, 0x0370_7344_1319_8a2e);
        assert_eq!(pi.block(0x85a3_08d3_243f_6a88), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn a_sequence_is_the_stream_in_order() {
        let philox = Philox::new(5, 6);
        let mut sequence = philox.sequence();
        assert!((0..11).all(|index| sequence.word() == philox.word(index)));
    }

    #[test]
    fn moments_of_the_normal_distribution() {
        let mut sequence = Philox::new(7, 1).sequence();
        let pairs: Vec<[f64; 2]> = (0..100_000).map(|_| sequence.normals()).collect();
        let [first, second] = [0, 1].map(|place| pairs.iter().map(|pair| pair[place]).collect::<Vec<f64>>());
        for draws in [(0..100_000).map(|_| sequence.normal()).collect(), first, second] {
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            assert!(mean.abs() < 0.015 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
        }
        let correlation = pairs.iter().map(|[a, b]| a * b).sum::<f64>() / pairs.len() as f64;
        assert!(correlation.abs() < 0.015, "{correlation}");
    }

    #[test]
    fn a_permutation_holds_each_index_once() {
        let mut order = Philox::keyed(3, &[1, 2]).sequence().permutation(1000);
        assert_ne!(order[..10], (0..10).collect::<Vec<_>>()[..]);
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
    }

    /// By a few lines of Python, written from the definitions. Weights, orders and augmentations of every run depend on
    /// these.
    #[test]
    fn numbers_stay_what_they_were() {
        assert_eq!(splitmix(0), 0xe220_a839_7b1d_cdaf); // as Vigna's reference code begins
        assert_eq!([1, 2].map(splitmix), [0x910a_2dec_8902_5cc1, 0x9758_35de_1c97_56ce]);
        let philox = Philox::new(7, 1);
        let of_unit = [0, 1, 2].map(|index| philox.uniform(index) * 16_777_216.0);
        assert_eq!(of_unit, [8_305_389.0, 2_881_241.0, 5_221_435.0]);
        let mut sequence = philox.sequence();
        assert_eq!((sequence.uniform(), sequence.uniform_in(-1.0, 1.0)), (0.4950397946340347, -0.3775564230860702));
        let mut sequence = philox.sequence();
        assert_eq!([(); 8].map(|()| sequence.below(10)), [4, 3, 8, 7, 2, 5, 2, 1]);
        assert_eq!(sequence.below(0), 0);
        assert_eq!(philox.sequence().permutation(8), [6, 0, 4, 1, 7, 5, 2, 3]);
        assert_eq!(Philox::keyed(1, &[2, 3]).block(0), [0x102e_13cc, 0xeae1_d170, 0x8b65_9e56, 0x3991_d0cc]);
    }

    #[test]
    fn streams_differ_and_repeat() {
        let words = |philox: Philox| (0..8).map(|i| philox.word(i)).collect::<Vec<_>>();
        assert_eq!(words(Philox::keyed(1, &[2, 3])), words(Philox::keyed(1, &[2, 3])));
        assert_ne!(words(Philox::keyed(1, &[2, 3])), words(Philox::keyed(1, &[3, 2])));
        assert_ne!(words(Philox::new(1, 2)), words(Philox::new(2, 2)));
    }
}
