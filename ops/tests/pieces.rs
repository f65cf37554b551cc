//! A batch in pieces computes what the whole batch does, with the same bits for any number of threads.

use autograd::{Gradients, ParamId, Parameters, ParametersBuilder, Profile, Result, Tape, Var, Work};
use std::ops::Range;
use std::sync::Arc;
use tensor::cpu::parallel::thread_pool;
use tensor::{DType, Tensor};

const SAMPLES: usize = 11;
const WIDTH: usize = 6;

/// Value, gradient of x, and gradients of the parameters.
type Results = [Vec<f64>; 3];

struct Network {
    parameters: Parameters,
    ids: Vec<ParamId>,
}

fn waves(count: usize, stride: f64) -> Vec<f64> {
    (0..count).map(|i| (i as f64 * stride).sin()).collect()
}

impl Network {
    fn new() -> Self {
        let mut builder = ParametersBuilder::default();
        // The last one is used outside of the pieces as well, the first one nowhere.
        let shapes: [&[usize]; 5] = [&[3], &[WIDTH, WIDTH], &[WIDTH], &[WIDTH], &[WIDTH]];
        let add = |(index, shape): (usize, &&[usize])| {
            builder.add(index.to_string(), *shape, waves(shape.iter().product(), 0.3 + index as f64))
        };
        let ids = shapes.iter().enumerate().map(add).collect();
        Self { parameters: builder.build(DType::F64).unwrap(), ids }
    }

    fn layers<'t>(&self, x: &Var<'t>) -> Result<Var<'t>> {
        let [_, weight, bias, gamma, beta] = [0, 1, 2, 3, 4].map(|i| x.tape().parameter(&self.parameters, self.ids[i]));
        let hidden = ops::gelu(&ops::linear(x, &weight, Some(&bias))?)?;
        ops::add(x, &ops::layer_norm(&hidden, &gamma, &beta, 1e-6)?)
    }

    /// In pieces of the first size, each of which is cut into pieces of the next.
    fn cut<'t>(&self, x: &Var<'t>, sizes: &[usize]) -> Result<Var<'t>> {
        let [size, inner @ ..] = sizes else { return self.layers(x) };
        Ok(x.tape().in_pieces(x, *size, |x, _| Ok::<_, autograd::Error>((self.cut(x, inner)?, ())))?.0)
    }

    fn run(&self, size: Option<usize>, tape: &Tape, gradients: &mut Gradients) -> Result<Results> {
        let input = tape.input(Tensor::from_slice(&waves(SAMPLES * 2 * WIDTH, 0.7), [SAMPLES, 2, WIDTH])?);
        let x = ops::scale(&input, 0.5)?;
        let y = match size {
            None => self.layers(&x)?,
            Some(size) => {
                let (y, samples) =
                    tape.in_pieces(&x, size, |x, samples| Ok::<_, autograd::Error>((self.layers(x)?, samples)))?;
                assert!(samples.iter().all(|samples| (1..=size).contains(&samples.len())), "{samples:?}");
                assert_eq!(samples.iter().map(Range::len).sum::<usize>(), SAMPLES);
                y
            }
        };
        // x has another use beside the pieces, and so has a parameter.
        let y = ops::add(&ops::add(&y, &x)?, &tape.parameter(&self.parameters, self.ids[4]))?;
        let loss = ops::sum(&ops::mul(&y, &y)?, &[0, 1, 2], false)?;
        let value = y.value().to_vec::<f64>()?;
        tape.backward(&loss, gradients)?;
        let dx = gradients.of(&input).expect("gradient of x").to_vec()?;
        Ok([value, dx, gradients.flat().expect("gradients").to_vec()?])
    }

    fn results(&self, size: Option<usize>, threads: usize) -> Results {
        let run = || {
            let mut gradients = Gradients::new(&self.parameters).unwrap();
            let results = self.run(size, &Tape::new(), &mut gradients)?;
            assert!(gradients.parameter(self.ids[0]).is_none(), "no gradient where none reaches");
            Ok::<_, autograd::Error>(results)
        };
        thread_pool(threads).unwrap().install(run).unwrap()
    }
}

#[test]
fn pieces_of_every_size_agree_with_the_whole() {
    tensor::set_poison(true);
    let network = Network::new();
    let whole = network.results(None, 1);
    for size in [1, 2, 3, 5, SAMPLES, 100] {
        let pieces = network.results(Some(size), 2);
        assert_eq!(pieces[0], whole[0], "values in pieces of {size}");
        for (pieces, whole) in pieces.iter().zip(&whole).skip(1) {
            for (piece, whole) in pieces.iter().zip(whole) {
                assert!((piece - whole).abs() <= 1e-12 * whole.abs().max(1.0), "{size}: {piece} is not {whole}");
            }
        }
        for threads in [1, 3, 8] {
            assert_eq!(network.results(Some(size), threads), pieces, "pieces of {size}, {threads} threads");
        }
    }
}

/// Groups of pieces have gradients of their own, to which the groups of a piece add theirs.
#[test]
fn pieces_may_be_cut_again() {
    let network = Network::new();
    let gradients = |sizes: &[usize]| -> Vec<f64> {
        let (tape, mut gradients) = (Tape::new(), Gradients::new(&network.parameters).unwrap());
        let x = tape.constant(Tensor::from_slice(&waves(SAMPLES * WIDTH, 0.7), [SAMPLES, WIDTH]).unwrap());
        let y = network.cut(&x, sizes).unwrap();
        let loss = ops::sum(&ops::mul(&y, &y).unwrap(), &[0, 1], false).unwrap();
        tape.backward(&loss, &mut gradients).unwrap();
        gradients.flat().unwrap().to_vec().unwrap()
    };
    let whole = gradients(&[]);
    for sizes in [[4, 1], [5, 2], [1, 1], [SAMPLES, 3]] {
        let agree = |(piece, whole): (&f64, &f64)| (piece - whole).abs() <= 1e-12 * whole.abs().max(1.0);
        assert!(gradients(&sizes).iter().zip(&whole).all(agree), "{sizes:?}");
    }
}

#[test]
fn gradients_add_up_over_passes_and_errors_come_out() {
    let network = Network::new();
    let mut gradients = Gradients::new(&network.parameters).unwrap();
    let [_, _, once] = network.run(Some(3), &Tape::new(), &mut gradients).unwrap();
    let [_, _, twice] = network.run(Some(3), &Tape::new(), &mut gradients).unwrap();
    assert!(once.iter().zip(&twice).all(|(once, twice)| (twice - 2.0 * once).abs() <= 1e-12 * once.abs()));

    let tape = Tape::new();
    let x = tape.constant(Tensor::zeros([4, WIDTH], DType::F64));
    let refused = tape.in_pieces(&x, 1, |x, samples| match samples.start {
        0 => Ok((x.clone(), ())),
        start => Err(autograd::Error::NotFinite { op: "test", node: start }),
    });
    assert_eq!(refused.unwrap_err().to_string(), autograd::Error::NotFinite { op: "test", node: 1 }.to_string());
    let cut = tape.in_pieces(&x, 2, |x, _| Ok::<_, autograd::Error>((ops::reshape(x, [1, 2 * WIDTH])?, ())));
    let error = cut.unwrap_err().to_string();
    assert!(error.contains("pieces: expected a piece of 2 samples"), "{error}");
    let empty = tape.constant(Tensor::zeros([0, WIDTH], DType::F64));
    let (y, _) = tape.in_pieces(&empty, 4, |x, _| Ok::<_, autograd::Error>((network.layers(x)?, ()))).unwrap();
    assert_eq!(*y.shape(), [0, WIDTH]);
}

#[test]
fn a_profile_sees_into_the_pieces() {
    let (network, profile) = (Network::new(), Arc::new(Profile::default()));
    let tape = Tape::new().profiled(Some(Arc::clone(&profile)));
    let started = std::time::Instant::now();
    profile.restart();
    network.run(Some(2), &tape, &mut Gradients::new(&network.parameters).unwrap()).unwrap();
    let elapsed = started.elapsed().as_secs_f64();
    let lines = profile.lines();
    for work in [Work::Forward, Work::Backward] {
        let linear = lines.iter().find(|line| line.name == "linear" && line.work == work).expect("a line");
        assert_eq!(linear.calls, 8, "pieces of at most 2 of 11 samples, as many in each of four groups");
    }
    let of_pieces: Vec<u64> = lines.iter().filter(|line| line.name == "pieces").map(|line| line.bytes).collect();
    assert_eq!(of_pieces, [0], "what they read and write is counted where they do");
    let total: f64 = lines.iter().map(|line| line.seconds).sum();
    assert!(total <= elapsed, "{total} s in {elapsed} s");
}

#[test]
fn pieces_of_a_parameter_may_use_it() {
    let mut builder = ParametersBuilder::default();
    let id = builder.add("w".to_owned(), [WIDTH, WIDTH], waves(WIDTH * WIDTH, 0.3));
    let parameters = builder.build(DType::F64).unwrap();
    fn layer<'t>(x: &Var<'t>, parameters: &Parameters, id: ParamId) -> Result<Var<'t>> {
        ops::linear(x, &x.tape().parameter(parameters, id), None)
    }
    let gradient = |in_pieces: bool| -> Vec<f64> {
        let (tape, mut gradients) = (Tape::new(), Gradients::new(&parameters).unwrap());
        let x = tape.parameter(&parameters, id);
        let y = match in_pieces {
            true => tape.in_pieces(&x, 1, |x, _| Ok::<_, autograd::Error>((layer(x, &parameters, id)?, ()))).unwrap().0,
            false => layer(&x, &parameters, id).unwrap(),
        };
        let loss = ops::sum(&ops::mul(&y, &y).unwrap(), &[0, 1], false).unwrap();
        tape.backward(&loss, &mut gradients).unwrap();
        gradients.parameter(id).unwrap().to_vec().unwrap()
    };
    for (piece, whole) in gradient(true).iter().zip(gradient(false)) {
        assert!((piece - whole).abs() <= 1e-12 * whole.abs().max(1.0), "{piece} is not {whole}");
    }
}

/// Whether or not it has a gradient from elsewhere.
#[test]
fn a_piece_that_ignores_its_samples_adds_nothing_to_their_gradient() {
    tensor::set_poison(true);
    for used_elsewhere in [false, true] {
        let tape = Tape::new();
        let x = tape.input(Tensor::full([4, 2], 3.0f64));
        let pieces = tape.in_pieces(&x, 2, |x, samples| {
            let y = if samples.start == 0 { ops::mul(x, x)? } else { x.detach() };
            Ok::<_, autograd::Error>((y, ()))
        });
        let (y, _) = pieces.unwrap();
        let y = if used_elsewhere { ops::add(&y, &x).unwrap() } else { y };
        let mut gradients = Gradients::default();
        tape.backward(&ops::sum(&y, &[0, 1], false).unwrap(), &mut gradients).unwrap();
        let expected =
            [[6.0; 4], [0.0; 4]].concat().iter().map(|dx| dx + f64::from(used_elsewhere)).collect::<Vec<_>>();
        assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), expected);
    }
}

/// In the second step its memory still holds the gradient of the first.
#[test]
fn a_parameter_may_be_used_by_later_pieces_alone() {
    let mut builder = ParametersBuilder::default();
    let id = builder.add("w", [1, 1], [3.0]);
    let parameters = builder.build(DType::F64).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    for _ in 0..2 {
        gradients.begin_step();
        let tape = Tape::new();
        let x = tape.constant(Tensor::from_slice(&[1.0, 2.0, 4.0, 8.0], [4, 1]).unwrap());
        let pieces = tape.in_pieces(&x, 1, |x, samples| {
            let w = x.tape().parameter(&parameters, id);
            let y = if samples.start == 0 { x.clone() } else { ops::mul(x, &w)? };
            Ok::<_, autograd::Error>((y, ()))
        });
        let (y, _) = pieces.unwrap();
        tape.backward(&ops::sum(&y, &[0, 1], false).unwrap(), &mut gradients).unwrap();
        assert_eq!(gradients.parameter(id).unwrap().to_vec::<f64>().unwrap(), [2.0 + 4.0 + 8.0]);
    }
}

/// Or an optimiser would apply weight decay and old moments to it.
#[test]
fn what_no_piece_depends_on_has_no_gradient() {
    let mut builder = ParametersBuilder::default();
    let [ignored, used] = ["ignored", "used"].map(|name| builder.add(name, [4, 2], waves(8, 0.3)));
    let parameters = builder.build(DType::F64).unwrap();
    let tape = Tape::new();
    let (x, interior) = (tape.parameter(&parameters, ignored), tape.input(Tensor::full([4, 2], 2.0f64)));
    for x in [&x, &ops::scale(&interior, 2.0).unwrap()] {
        let pieces = tape.in_pieces(x, 2, |x, samples| {
            let used = ops::slice(&x.tape().parameter(&parameters, used), 0, samples)?;
            Ok::<_, autograd::Error>((ops::mul(&x.detach(), &used)?, ()))
        });
        let (y, _) = pieces.unwrap();
        let mut gradients = Gradients::new(&parameters).unwrap();
        tape.backward(&ops::sum(&y, &[0, 1], false).unwrap(), &mut gradients).unwrap();
        assert!(gradients.parameter(ignored).is_none() && gradients.parameter(used).is_some());
        assert!(gradients.of(&interior).is_none());
        assert_eq!(gradients.require_all(), Err(autograd::Error::Unreached { names: vec!["ignored".into()] }));
    }
}
