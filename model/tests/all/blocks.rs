//! What a block, its attention and the random streams of a pass must fulfil, each by itself, in f64.

use autograd::{Parameters, Tape};
use model::{
    Attention, BatchNorm, Block, Builder, Error, Family, Linear, Mode, ModelConfig, Pass, PerStage, Result,
    RunningStatistics, TensorFile,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use tensor::rng::Philox;
use tensor::{DType, Tensor};

const DIM: usize = 16;

/// One stage of one block, which routes.
fn config() -> ModelConfig {
    let (depth, embed_dim, topks, n_win) = (vec![1], vec![DIM], vec![2], PerStage::All(2));
    ModelConfig { depth, embed_dim, topks, n_win, head_dim: 8, ..ModelConfig::default() }
}

fn random(count: usize, stream: u64) -> Vec<f64> {
    (0..count).map(|i| f64::from(Philox::new(7, stream).uniform(i as u64)) - 0.5).collect()
}

/// So many maps (N, 4, 4, C).
fn maps(images: usize) -> Result<Tensor> {
    Ok(Tensor::from_slice(&random(images * 16 * DIM, 1), [images, 4, 4, DIM])?)
}

/// Gives a parameter other values, by their places in it.
fn set(parameters: &mut Parameters, name: &str, value: impl Fn(usize) -> f64) -> Result<()> {
    let id = parameters.layout().find(name).unwrap_or_else(|| panic!("there is no {name}"));
    let shape = parameters.layout().shape(id).clone();
    let values: Vec<f64> = (0..shape.count()).map(value).collect();
    Ok(parameters.set(id, &Tensor::from_slice(&values, shape)?)?)
}

#[track_caller]
fn assert_close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (place, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < 1e-12, "{place}: {got}, not {expected}");
    }
}

#[test]
fn no_two_draws_of_a_run_share_random_numbers() {
    let mut seen = BTreeSet::new();
    for (seed, step, draw) in (0..27).map(|i| (i / 9, i / 3 % 3, i % 3)) {
        let stream = Mode::Train { seed, step }.stream(draw).expect("a stream, in training");
        assert!(seen.insert(stream.block(0)), "draw {draw} of step {step} with seed {seed}");
    }
    assert!(Mode::Evaluate.stream(0).is_none());
}

/// Blocks are segments: what one draws, another must not.
#[test]
fn every_draw_of_a_pass_is_from_a_stream_of_its_own_and_a_segment_keeps_its_statistics() -> Result<()> {
    let mut builder = Builder::new(1);
    let norm = BatchNorm::new(&mut builder, "norm", DIM);
    let (parameters, running) = builder.build(DType::F64)?;
    for tape in [Tape::new(), Tape::recomputing_segments()] {
        let pass = Pass::new(&tape, Mode::Train { seed: 3, step: 5 }, &parameters, &running);
        let drawn = Arc::new(Mutex::new(vec![pass.stream()]));
        let (draws, norm) = (Arc::clone(&drawn), norm.clone());
        pass.segment(tape.constant(maps(2)?), move |pass, x| {
            draws.lock().unwrap().extend([pass.stream(), pass.stream()]);
            norm.forward(pass, &x)
        })?;
        drawn.lock().unwrap().push(pass.stream());
        let streams: BTreeSet<_> = drawn.lock().unwrap().iter().flatten().map(|stream| stream.block(0)).collect();
        assert_eq!(streams.len(), 4);
        assert_eq!(pass.into_trace().statistics.len(), 1);
    }
    Ok(())
}

/// Twice in a row, so that the second pieces must draw on from where the first left off.
#[test]
fn the_same_samples_are_dropped_in_a_batch_and_in_its_pieces() -> Result<()> {
    let mut builder = Builder::new(1);
    let block = Block::new(&mut builder, "block", &config(), 0, 0.5);
    let (parameters, running) = builder.build(DType::F64)?;
    let tape = Tape::inference();
    let x = tape.constant(maps(5)?);
    let pass = || Pass::new(&tape, Mode::Train { seed: 3, step: 5 }, &parameters, &running);
    for size in [1, 2] {
        let (whole, pieces) = (pass(), pass());
        for _ in 0..2 {
            let expected = block.forward(&whole, x.clone())?.into_value().to_vec::<f64>()?;
            let got = pieces.in_pieces(&x, size, |pass, x| block.forward(pass, x.clone()))?;
            assert_close(&got.into_value().to_vec::<f64>()?, &expected);
        }
    }
    Ok(())
}

/// With equal scores full attention is the mean of the values; a kernel that is 1 in its middle and 0 elsewhere adds to
/// that whatever the local context is of.
#[test]
fn local_context_is_of_the_input_and_in_the_nchw_layout_of_the_values() -> Result<()> {
    let (weight, x) = (random(DIM * DIM, 2), maps(1)?);
    let tokens = x.to_vec::<f64>()?;
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let values: Vec<f64> = tokens
        .chunks(DIM)
        .flat_map(|token| weight.chunks(DIM).map(|row| dot(row, token)).collect::<Vec<_>>())
        .collect();
    let mean = |channel: usize| values.iter().skip(channel).step_by(DIM).sum::<f64>() / 16.0;
    for (family, topk, context) in [(Family::BiformerStl, -2, &tokens), (Family::BiformerStlNchw, -1, &values)] {
        let mut builder = Builder::new(1);
        let attention = Attention::new(&mut builder, "attn", &ModelConfig { family, topks: vec![topk], ..config() }, 0);
        let (mut parameters, running) = builder.build(DType::F64)?;
        set(&mut parameters, "attn.qkv.weight", |i| i.checked_sub(2 * DIM * DIM).map_or(0.0, |i| weight[i]))?;
        set(&mut parameters, "attn.proj.weight", |i| f64::from(i / DIM == i % DIM))?;
        set(&mut parameters, "attn.proj.bias", |_| 0.0)?;
        set(&mut parameters, "attn.lepe.weight", |i| f64::from(i % 25 == 12))?;
        set(&mut parameters, "attn.lepe.bias", |_| 0.0)?;
        let tape = Tape::inference();
        let pass = Pass::new(&tape, Mode::Evaluate, &parameters, &running);
        let got = attention.forward(&pass, tape.constant(x.clone()), None)?.into_value().to_vec::<f64>()?;
        let expected: Vec<f64> = context.iter().enumerate().map(|(i, x)| mean(i % DIM) + x).collect();
        assert_close(&got, &expected);
    }
    Ok(())
}

/// Where queries are zero all scores are equal: each of the k = 2 regions weighs a half.
#[test]
fn soft_routing_weighs_values_by_their_scores() -> Result<()> {
    let output = |soft_routing| -> Result<Vec<f64>> {
        let (mut builder, config) = (Builder::new(1), ModelConfig { soft_routing, lce_kernel: 0, ..config() });
        let attention = Attention::new(&mut builder, "attn", &config, 0);
        let (mut parameters, running) = builder.build(DType::F64)?;
        let weight = random(3 * DIM * DIM, 2);
        set(&mut parameters, "attn.qkv.qkv.weight", |i| if i < DIM * DIM { 0.0 } else { weight[i] })?;
        set(&mut parameters, "attn.qkv.qkv.bias", |_| 0.0)?;
        set(&mut parameters, "attn.wo.bias", |_| 0.0)?;
        let tape = Tape::inference();
        let pass = Pass::new(&tape, Mode::Evaluate, &parameters, &running);
        Ok(attention.forward(&pass, tape.constant(maps(1)?), None)?.into_value().to_vec::<f64>()?)
    };
    let hard: Vec<f64> = output(false)?.iter().map(|x| 0.5 * x).collect();
    assert_close(&output(true)?, &hard);
    Ok(())
}

/// A branch whose last layer is zero adds nothing, as one whose γ is zero.
#[test]
fn gamma_1_scales_attention_and_gamma_2_the_mlp() -> Result<()> {
    let output = |layer_scale: f64, change: &dyn Fn(&mut Parameters) -> Result<()>| -> Result<Vec<f64>> {
        // Initial values depend on seed and name alone: the weights are the same with layer scale and without.
        let mut builder = Builder::new(1);
        let block = Block::new(&mut builder, "block", &ModelConfig { layer_scale, ..config() }, 0, 0.0);
        let (mut parameters, running) = builder.build(DType::F64)?;
        change(&mut parameters)?;
        let tape = Tape::inference();
        let pass = Pass::new(&tape, Mode::Evaluate, &parameters, &running);
        Ok(block.forward(&pass, tape.constant(maps(1)?))?.into_value().to_vec::<f64>()?)
    };
    for (gammas, silent) in [([0.0, 1.0], "block.attn.wo.weight"), ([1.0, 0.0], "block.mlp.3.weight")] {
        let scaled = output(0.5, &|parameters| {
            set(parameters, "block.gamma1", |_| gammas[0])?;
            set(parameters, "block.gamma2", |_| gammas[1])
        })?;
        assert_close(&scaled, &output(0.0, &|parameters| set(parameters, silent, |_| 0.0))?);
    }
    Ok(())
}

#[test]
fn a_stage_that_is_not_valid_is_named() {
    let said = |config: &ModelConfig, stage| {
        let built = std::panic::catch_unwind(|| Attention::new(&mut Builder::blank(), "attention", config, stage));
        let said = built.expect_err("not a stage");
        said.downcast_ref::<String>().unwrap().clone()
    };
    assert!(said(&config(), 1).contains("there is no stage 1"), "{}", said(&config(), 1));
    for head_dim in [0, 7] {
        let config = ModelConfig { head_dim, ..config() };
        assert!(said(&config, 0).contains("does not divide the 16 channels"), "{}", said(&config, 0));
    }
    let short = ModelConfig { embed_dim: vec![], ..config() };
    assert!(said(&short, 0).contains("0 values for the 1 stages"), "{}", said(&short, 0));
    for drop_path in [-1.0, 1.0, f64::NAN] {
        let block = || Block::new(&mut Builder::blank(), "block", &config(), 0, drop_path);
        assert!(std::panic::catch_unwind(block).is_err(), "{drop_path}");
    }
}

/// A layer knows its statistics by their place and their name.
#[test]
fn statistics_of_another_model_are_refused() -> Result<()> {
    let built = |names: &[&str]| -> Result<_> {
        let mut builder = Builder::new(1);
        let norms: Vec<_> = names.iter().map(|name| BatchNorm::new(&mut builder, name, 1)).collect();
        let (parameters, running) = builder.build(DType::F64)?;
        Ok((norms, parameters, running))
    };
    let (norms, parameters, own) = built(&["first", "second"])?;
    let tape = Tape::inference();
    let x = tape.constant(Tensor::from_slice(&[1.0, 3.0], [2, 1])?);
    let train = Pass::new(&tape, Mode::Train { seed: 1, step: 0 }, &parameters, &own);
    norms[1].forward(&train, &x)?;
    let trace = train.into_trace();
    for (names, fit) in [(&["first"][..], false), (&["second", "first"], false), (&["other", "second"], true)] {
        let (_, _, mut theirs) = built(names)?;
        let pass = Pass::new(&tape, Mode::Evaluate, &parameters, &theirs);
        let refused = |result: Result<()>| matches!(result, Err(Error::Pass { .. }));
        assert_eq!(refused(norms[1].forward(&pass, &x).map(drop)), !fit, "{names:?}");
        drop(pass);
        assert_eq!(refused(RunningStatistics::update(&mut theirs, &trace)), !fit, "{names:?}");
    }
    Ok(())
}

/// A tenth of the way from 0 and 1 to the mean and the unbiased variance of 1 and 3; and not while somebody reads them.
#[test]
fn running_statistics_of_ones_own_model_move_by_its_batches() -> Result<()> {
    let mut builder = Builder::new(1);
    let norms = ["first", "second"].map(|name| BatchNorm::new(&mut builder, name, 1));
    let (parameters, mut running) = builder.build(DType::F64)?;
    let tape = Tape::new();
    let pass = Pass::new(&tape, Mode::Train { seed: 1, step: 0 }, &parameters, &running);
    let x = tape.constant(Tensor::from_slice(&[1.0, 3.0], [2, 1])?);
    let y = [norms[0].forward(&pass, &x)?, norms[1].forward(&pass, &x)?];
    let trace = pass.into_trace();
    let now = |running: &RunningStatistics| -> Result<_> {
        Ok((running.mean.item::<f64>()?, running.variance.item::<f64>()?, running.batches))
    };
    let reading = Pass::new(&tape, Mode::Evaluate, &parameters, &running);
    assert!(RunningStatistics::update(&mut running, &trace).is_err());
    drop((y, reading));
    let last = running[1].variance.clone();
    assert!(RunningStatistics::update(&mut running, &trace).is_err());
    drop(last);
    assert_eq!(now(&running[0])?, (0.0, 1.0, 0), "nothing moves where not all can");
    RunningStatistics::update(&mut running, &trace)?;
    for running in &running {
        let (mean, variance, batches) = now(running)?;
        assert!((mean - 0.2).abs() < 1e-12 && (variance - 1.1).abs() < 1e-12 && batches == 1, "{mean} {variance}");
    }
    for number in [f64::NAN, f64::INFINITY] {
        let pass = Pass::new(&tape, Mode::Train { seed: 1, step: 1 }, &parameters, &running);
        norms[1].forward(&pass, &tape.constant(Tensor::from_slice(&[1.0, number], [2, 1])?))?;
        let spoilt = pass.into_trace();
        let refused = RunningStatistics::update(&mut running, &spoilt);
        assert!(matches!(refused, Err(Error::Pass { reason: "its batch statistics are not finite" })), "{number}");
    }
    assert!(RunningStatistics::update(&mut running[..1], &trace).is_err(), "a trace of more");
    assert!(RunningStatistics::update(&mut [], &trace).is_err(), "a trace of some");
    Ok(())
}

#[test]
fn ones_own_model_is_written_and_read() -> Result<()> {
    let model = |seed| {
        let mut builder = Builder::new(seed);
        BatchNorm::new(&mut builder, "norm", 3);
        Linear::new(&mut builder, "linear", 3, 2, true);
        builder.build(DType::F32)
    };
    let (mut own, (theirs, mut moved)) = (model(1)?, model(2)?);
    moved[0].batches = 7;
    let file = TensorFile::of(&theirs, &moved)?.duplicate()?;
    let bytes = |(parameters, running): &(Parameters, Vec<_>)| TensorFile::of(parameters, running)?.to_bytes();
    let before = bytes(&own)?;
    let mut torn = file.clone();
    let taken = torn.tensors.remove("linear.bias").unwrap();
    torn.tensors.insert("linear.extra".into(), taken);
    let refused = torn.put(&mut own.0, &mut own.1, "torn").unwrap_err().to_string();
    assert!(refused.contains("linear.bias (2) is missing") && refused.contains("linear.extra"), "{refused}");
    assert_eq!(bytes(&own)?, before);
    file.put(&mut own.0, &mut own.1, "file")?;
    assert_eq!(bytes(&own)?, file.to_bytes()?);
    assert_eq!(own.1[0].batches, 7);
    Ok(())
}
