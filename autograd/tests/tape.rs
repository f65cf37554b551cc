//! What the tape promises: gradients that add up, and nothing lost in silence.

mod support;

use autograd::{Error, Gradients, ParametersBuilder, Profile, Tape, Work};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use support::{of, parameters, pass, times, vector};
use tensor::{DType, Tensor};

#[test]
fn micro_batches_add_up_until_the_next_step_begins() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    gradients.begin_step();
    pass(&parameters, p, &[5.0, 7.0], &mut gradients);
    assert_eq!(of(&gradients, p), [5.0, 7.0]);
    pass(&parameters, p, &[1.0, 2.0], &mut gradients);
    assert_eq!(of(&gradients, p), [6.0, 9.0]);
    gradients.begin_step();
    assert!(gradients.parameter(p).is_none());
    pass(&parameters, p, &[1.0, 2.0], &mut gradients);
    assert_eq!(of(&gradients, p), [1.0, 2.0], "stored, not added to the last step's");
}

#[test]
fn after_an_optimisers_step_gradients_are_read_but_not_added_to() {
    let (parameters, p, other) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    for (id, upstream) in [(p, &[5.0, 7.0][..]), (other, &[1.0; 3])] {
        pass(&parameters, id, upstream, &mut gradients);
    }
    gradients.require_all().unwrap();
    gradients.end_step();
    assert_eq!(of(&gradients, p), [5.0, 7.0]);
    assert_eq!(gradients.require_all(), Err(Error::NoBackward), "for another step");
    pass(&parameters, p, &[1.0, 2.0], &mut gradients);
    assert_eq!(of(&gradients, p), [1.0, 2.0]);
    assert!(gradients.parameter(other).is_none(), "it has none of this step");
    pass(&parameters, p, &[1.0, 2.0], &mut gradients);
    assert_eq!(of(&gradients, p), [2.0, 4.0]);
}

#[test]
fn a_parameter_at_several_places_collects_all_its_gradients() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    // p·p, with p recorded once and twice: twice an input of one operation, and two nodes.
    for nodes in [1, 2] {
        let tape = Tape::new();
        let first = tape.parameter(&parameters, p);
        let second = if nodes == 1 { first.clone() } else { tape.parameter(&parameters, p) };
        let y = times(&times(&first, &second).unwrap(), &first).unwrap();
        gradients.begin_step();
        tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).unwrap();
        assert_eq!(of(&gradients, p), [12.0, 27.0], "3p², {nodes} nodes");
    }
}

#[test]
fn inputs_and_constants() {
    let tape = Tape::new();
    let (x, c) = (tape.input(vector(&[2.0])), tape.constant(vector(&[5.0])));
    let y = times(&times(&x, &x).unwrap(), &c).unwrap();
    let mut gradients = Gradients::default();
    tape.backward(&y, &mut gradients).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), [20.0]);
    assert!(gradients.of(&c).is_none());
    assert!(tape.to_string().contains("times"), "{tape}");
    assert_eq!(tape.saved_bytes(), 0, "freed on the way");
}

#[test]
fn gradients_of_inputs_add_up_as_those_of_parameters_do() {
    let (parameters, p, _) = parameters();
    let tape = Tape::new();
    let (x, p_on_tape) = (tape.input(vector(&[2.0, 3.0])), tape.parameter(&parameters, p));
    let losses = [(); 2].map(|()| times(&x, &p_on_tape).unwrap());
    let mut gradients = Gradients::new(&parameters).unwrap();
    for (i, loss) in losses.iter().enumerate() {
        tape.backward_from(loss, vector(&[1.0, 10.0]), &mut gradients).unwrap();
        let so_far = (i + 1) as f64;
        assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), [2.0 * so_far, 30.0 * so_far]);
        assert_eq!(of(&gradients, p), [2.0 * so_far, 30.0 * so_far]);
    }
    tape.backward_from(&x, vector(&[0.5, 0.25]), &mut gradients).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), [4.5, 60.25]);
    // Not those of another tape, nor of an earlier step.
    let other = Tape::new();
    let y = other.input(vector(&[1.0]));
    other.backward(&times(&y, &y).unwrap(), &mut gradients).unwrap();
    assert!(gradients.of(&x).is_none());
    gradients.begin_step();
    assert!(gradients.of(&y).is_none());
}

#[test]
fn a_parameter_of_another_model_is_not_taken_for_ones_own() {
    let (own, p, q) = parameters();
    let (alike, ..) = parameters();
    assert_eq!(alike.get(p).to_vec::<f64>().unwrap(), own.get(p).to_vec::<f64>().unwrap());
    let mut builder = ParametersBuilder::default();
    builder.add("other", [2], vec![7.0; 2]);
    let other = builder.build(DType::F64).unwrap();
    // Another parameter is in the place of one, and none in that of the other.
    for id in [p, q] {
        let taken = catch_unwind(AssertUnwindSafe(|| other.get(id)));
        let message = *taken.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains("of another model"), "{message}");
    }
}

#[test]
fn parameters_that_no_buffer_could_hold_are_refused() {
    for shapes in [&[&[1usize << 40, 1 << 40][..]][..], &[&[1 << 62]], &[&[1 << 58], &[1 << 58]]] {
        let mut builder = ParametersBuilder::default();
        for (i, &shape) in shapes.iter().enumerate() {
            builder.add(i.to_string(), shape, std::iter::repeat(0.0));
        }
        let error = builder.build(DType::F32).unwrap_err().to_string();
        assert!(error.contains("than can be counted"), "{error}");
    }
}

#[test]
fn an_inference_tape_records_nothing() {
    let tape = Tape::inference();
    let x = tape.input(vector(&[2.0]));
    let y = times(&x, &x).unwrap();
    assert!(tape.nodes().is_empty() && y.node().is_none());
    let error = tape.backward(&y, &mut Gradients::default()).unwrap_err();
    assert_eq!(error, Error::NotRecorded);
    assert!(error.to_string().contains("Tape::new records"), "{error}");
}

#[test]
fn a_bare_parameter_is_no_result() {
    let (parameters, p, _) = parameters();
    let tape = Tape::new();
    let y = tape.parameter(&parameters, p);
    let mut gradients = Gradients::new(&parameters).unwrap();
    let error = tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).unwrap_err();
    assert_eq!(error, Error::BareParameter);
    assert!(error.to_string().contains("a parameter itself"), "{error}");
}

#[test]
fn an_input_of_another_tape_has_no_gradient() {
    let mut gradients = Gradients::default();
    let differentiate = |gradients: &mut Gradients, tape: &Tape| {
        let x = tape.input(vector(&[2.0]));
        tape.backward(&times(&x, &x).unwrap(), gradients).unwrap();
    };
    let (first, second) = (Tape::new(), Tape::new());
    let x = first.input(vector(&[7.0]));
    differentiate(&mut gradients, &second);
    assert!(gradients.of(&x).is_none(), "the same line of another tape");
    // Nor has one of a tape that is gone, where the next one may lie in its place.
    differentiate(&mut gradients, &Tape::new());
    assert!(gradients.of(&Tape::new().input(vector(&[7.0]))).is_none());
}

#[test]
fn a_value_of_another_tape_is_refused() {
    let (one, two) = (Tape::new(), Tape::new());
    let (a, b) = (one.input(vector(&[1.0])), two.input(vector(&[1.0])));
    assert!(matches!(times(&a, &b).unwrap_err(), Error::ForeignVar { op: "times" }));
    let y = times(&a, &a).unwrap();
    assert!(matches!(two.backward(&y, &mut Gradients::default()).unwrap_err(), Error::ForeignVar { .. }));
    let segments = Tape::recomputing_segments();
    let refused = segments.segment([a.clone()], |_, [x]| Ok::<_, Error>((times(&x, &x)?, ()))).unwrap_err();
    assert!(matches!(refused, Error::ForeignVar { .. }), "{refused}");
    for other in [two, Tape::inference()] {
        let refused = other.in_pieces(&a, 1, |x, _| Ok::<_, Error>((times(x, x)?, ()))).unwrap_err();
        assert!(matches!(refused, Error::ForeignVar { .. }), "{refused}");
    }
}

#[test]
fn a_parameter_keeps_its_shape() {
    let (mut parameters, p, _) = parameters();
    let before = parameters.flat().to_vec::<f64>().unwrap();
    for wrong in [&[1.0][..], &[1.0; 3]] {
        let refused = parameters.set(p, &vector(wrong)).unwrap_err();
        assert!(matches!(refused, Error::Tensor(tensor::Error::Shape { .. })), "{refused}");
        assert_eq!(parameters.flat().to_vec::<f64>().unwrap(), before);
    }
}

#[test]
fn a_tape_is_walked_once() {
    let tape = Tape::new();
    let x = tape.input(vector(&[2.0]));
    let y = times(&x, &x).unwrap();
    tape.backward(&y, &mut Gradients::default()).unwrap();
    let error = tape.backward(&y, &mut Gradients::default()).unwrap_err();
    assert_eq!(error, Error::Walked { op: "times" });
    assert!(error.to_string().contains("walked already"), "{error}");
}

#[test]
fn gradients_can_be_changed_before_the_optimiser_sees_them() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    pass(&parameters, p, &[5.0, 7.0], &mut gradients);
    gradients.flat_mut::<f64>().unwrap().unwrap()[parameters.layout().span(p)].fill(4.0);
    assert_eq!(of(&gradients, p), [4.0, 4.0]);
    let view = gradients.parameter(p);
    assert!(matches!(gradients.flat_mut::<f64>(), Err(Error::Tensor(tensor::Error::Shared { .. }))));
    drop(view);
    assert!(Gradients::default().flat_mut::<f64>().unwrap().is_none());
}

#[test]
fn parameters_are_not_written_while_somebody_looks_at_them() {
    let (mut parameters, p, _) = parameters();
    let view = parameters.get(p);
    let error = parameters.flat_mut::<f64>().unwrap_err();
    assert!(matches!(error, Error::Tensor(tensor::Error::Shared { .. })), "{error}");
    drop(view);
    parameters.flat_mut::<f64>().unwrap()[0] = 9.0;
    assert_eq!(parameters.get(p).to_vec::<f64>().unwrap(), [9.0, 3.0]);
}

#[test]
fn the_first_value_that_is_not_finite_is_named() {
    let tape = Tape::checking_finite();
    let x = tape.input(vector(&[1e200]));
    let y = times(&x, &x).unwrap_err();
    assert_eq!(y, Error::NotFinite { op: "times", node: 1 });
    let small = tape.input(vector(&[1e100]));
    let y = times(&small, &small).unwrap();
    assert_eq!(times(&y, &y).unwrap_err(), Error::NotFinite { op: "times", node: 3 });
    let other = Tape::new();
    let x = other.input(vector(&[1e200]));
    assert!(times(&x, &x).unwrap().value().item::<f64>().unwrap().is_infinite(), "nobody asked");
}

#[test]
fn a_tape_shows_what_came_from_what_and_what_is_kept() {
    let tape = Tape::new();
    let (x, c) = (tape.input(vector(&[2.0, 3.0])), tape.constant(vector(&[5.0, 7.0])));
    times(&x, &c).unwrap();
    let shown = tape.to_string();
    let words: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[0], ["node", "operation", "from", "shape", "keeps"]);
    assert_eq!(words[1], ["0", "input", "(2)"]);
    assert_eq!(words[2], ["1", "times", "0", "-", "(2)", "a", "(2),", "b", "(2)"]);
    assert_eq!(words[3], ["32", "bytes", "kept"]);
}

#[test]
fn parameters_begin_at_cache_lines_and_gaps_hold_zeros() {
    for (dtype, per_line) in [(DType::F32, 16), (DType::F64, 8)] {
        let mut builder = ParametersBuilder::default();
        let ids = [("a", 5), ("b", per_line), ("c", 1)].map(|(name, count)| {
            let values = vec![2.0; count];
            builder.add(name, [count], values)
        });
        let parameters = builder.build(dtype).unwrap();
        let layout = parameters.layout();
        let starts = ids.map(|id| layout.span(id).start);
        assert_eq!((starts, layout.len()), ([0, per_line, 2 * per_line], 3 * per_line), "{dtype}");
        assert_eq!((layout.ids().len(), layout.count()), (3, 6 + per_line));
        assert_eq!((layout.find("c"), layout.find("d")), (Some(ids[2]), None));
        let flat = parameters.flat().cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
        let of_some = |place: &usize| ids.iter().any(|&id| layout.span(id).contains(place));
        assert!((0..flat.len()).all(|place| flat[place] == if of_some(&place) { 2.0 } else { 0.0 }), "{flat:?}");
    }
}

#[test]
fn a_profile_counts_what_is_recorded_and_what_is_walked() {
    let profile = Arc::<Profile>::default();
    let tape = Tape::new().profiled(Some(profile.clone()));
    let (x, c) = (tape.input(vector(&[2.0, 3.0])), tape.constant(vector(&[5.0, 7.0])));
    let y = times(&times(&x, &x).unwrap(), &c).unwrap();
    profile.lap("rest");
    tape.backward_from(&y, vector(&[1.0, 1.0]), &mut Gradients::default()).unwrap();
    let lines = profile.lines();
    let counts: Vec<_> = lines.iter().map(|l| (l.name, l.work, l.calls, l.multiply_adds, l.bytes)).collect();
    let expected = [
        ("times", Work::Forward, 2, 4, 2 * 3 * 16),
        ("rest", Work::Other, 1, 0, 0),
        // Of the constant there is no gradient: upstream, two saved factors, and one gradient or two.
        ("times", Work::Backward, 2, 2 + 4, (4 + 5) * 16),
    ];
    assert_eq!(counts, expected);

    profile.restart();
    let tape = Tape::inference().profiled(Some(profile.clone()));
    let x = tape.input(vector(&[2.0]));
    let y = times(&x, &x).unwrap();
    assert!(tape.nodes().is_empty() && y.node().is_none(), "watched, it still records nothing");
    assert_eq!(profile.lines()[0].multiply_adds, 1);
}

#[test]
fn an_upstream_gradient_that_is_not_like_the_value_is_refused() {
    let tape = Tape::new();
    let x = tape.input(vector(&[2.0, 3.0]));
    let y = times(&x, &x).unwrap();
    let refused = |upstream: Tensor| tape.backward_from(&y, upstream, &mut Gradients::default()).unwrap_err();
    let error = refused(vector(&[1.0]));
    assert!(matches!(error, Error::Tensor(tensor::Error::Shape { op: "backward", .. })), "{error}");
    let error = refused(vector(&[1.0, 1.0]).cast(DType::F32).unwrap());
    assert_eq!(error.to_string(), "backward: expected f64 elements, got f32");
}

/// On the CPU, where its gradient is f32.
#[test]
fn a_backward_pass_begins_at_a_bf16_value() {
    let tape = Tape::new();
    let x = tape.input(vector(&[2.0]).cast(DType::Bf16).unwrap());
    let mut gradients = Gradients::default();
    tape.backward(&x, &mut gradients).unwrap();
    tape.backward_from(&x, vector(&[3.0]).cast(DType::F32).unwrap(), &mut gradients).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f32>().unwrap(), [4.0]);
}

/// Also where it fails before it begins.
#[test]
fn a_backward_pass_that_fails_leaves_no_gradients() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    let (tape, elsewhere) = (Tape::new(), Tape::new());
    let parameter = tape.parameter(&parameters, p);
    let y = times(&tape.constant(vector(&[1.0, 2.0])), &parameter).unwrap();
    let constant = tape.constant(vector(&[1.0]));
    let one = || vector(&[1.0, 1.0]);
    for attempt in 0..5 {
        pass(&parameters, p, &[5.0, 7.0], &mut gradients);
        let failed = match attempt {
            0 => tape.backward(&y, &mut gradients),
            1 => tape.backward(&constant, &mut gradients),
            2 => elsewhere.backward_from(&y, one(), &mut gradients),
            3 => tape.backward_from(&y, vector(&[1.0]), &mut gradients),
            _ => {
                let view = gradients.parameter(p);
                let failed = tape.backward_from(&y, one(), &mut gradients);
                drop(view);
                failed
            }
        };
        assert!(failed.is_err() && gradients.parameter(p).is_none(), "attempt {attempt}");
    }
    tape.backward_from(&y, one(), &mut gradients).unwrap();
    assert_eq!(of(&gradients, p), [1.0, 2.0]);
}

#[test]
fn a_frozen_parameter_is_a_constant_whose_gradient_nobody_misses() {
    let (mut parameters, p, q) = parameters();
    for frozen in [true, false] {
        parameters.freeze(|name| frozen && name == "q");
        let layout = parameters.layout();
        assert_eq!([p, q].map(|id| layout.is_frozen(id)), [false, frozen]);
        assert_eq!(Tape::new().parameter(&parameters, q).node().is_none(), frozen);
        let mut gradients = Gradients::new(&parameters).unwrap();
        pass(&parameters, p, &[5.0, 7.0], &mut gradients);
        match gradients.require_all() {
            Ok(()) => assert!(frozen),
            Err(error) => assert!(!frozen && error == Error::Unreached { names: vec!["q".into()] }, "{error}"),
        }
    }
}
